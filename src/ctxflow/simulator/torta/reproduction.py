"""x"""

def reproduce(request):
    return {}
